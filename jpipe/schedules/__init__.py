"""Who does what, and when, as plain data: orders, their ticks, their times and pictures. Knows NumPy alone."""
