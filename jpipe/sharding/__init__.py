"""How arrays lie on the devices of one stage, and the program that one of them runs. Knows `jax_tools`."""
