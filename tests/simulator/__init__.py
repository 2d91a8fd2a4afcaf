"""A scheduler under random loads, on a virtual clock."""
