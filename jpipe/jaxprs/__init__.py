"""Makes jaxprs of functions, looks into them, rewrites them and runs them, before arrays are split."""
