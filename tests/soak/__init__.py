"""Thousands of mixed requests with every kind of trouble against a real server process."""
