"""Turns a checkpoint into something that takes steps.

Nothing in here imports the server, grpc or asyncio: an engine is usable on its own.
"""
