"""Measuring a server from outside: load, what it brought, and how many bytes it took."""
