"""Does small things with arrays and pytrees of arrays: dtypes, slices at traced indices, loops that copy nothing."""
