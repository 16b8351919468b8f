"""How arrays lie on the devices of one stage, and what one of them runs. Knows `jax_tools`.

In the order in which they import each other: `shardings` (how an array lies, and conversions), `meshes` (the axes),
`splits` (what weights and examples are split over); `rule_result` (what a rule answers), `elementwise`, `products`,
`lookups` and `rules` (what operations do to shards); `partitioner` (carries out equations), `control_flow` and
`user_shardings` (equations that need more than a rule), `spmd` (the entrance: `partition_jaxpr`).
"""
