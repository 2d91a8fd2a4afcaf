"""The models that requests can name, each with its pool."""

import asyncio
import secrets
from collections.abc import Iterator

import numpy as np

from streamsrv.errors import ModelNotFoundError
from streamsrv.pool import WorkerPool


class ServedModels:
    """The pools by their models' names. They come and go; one that goes still has streams for a while.

    All methods are for the loop's thread.
    """

    def __init__(self, default: str, instance_id: str | None = None) -> None:
        """`default` is the model of requests that name none, served or not.

        `instance_id` begins the stream ids of all pools: five letters or digits, random if not given.
        """
        self.default = default
        self.instance_id = instance_id or np.base_repr(36**4 + secrets.randbelow(35 * 36**4), 36).lower()
        self._served: dict[str, WorkerPool] = {}
        self._retired: dict[str, WorkerPool] = {}
        self._num_instance_ids = 0

    def next_instance_id(self) -> str:
        """Make the beginning of the next pool's stream ids: unlike that of any pool before."""
        number = self._num_instance_ids
        self._num_instance_ids += 1
        # The first is the server's own: with one model there is one for both.
        return self.instance_id + (np.base_repr(number, 36).lower() if number else "")

    def has_had(self, instance_id: str) -> bool:
        """Whether a pool of this server had this beginning of its stream ids."""
        own, number = instance_id[: len(self.instance_id)], instance_id[len(self.instance_id) :]
        if own != self.instance_id or not (number.isalnum() or not number) or not number.isascii():
            return False
        return int(number or "0", 36) < self._num_instance_ids

    def add(self, name: str, pool: WorkerPool) -> None:
        """Serve a model from now on; the pool's workers are ready."""
        assert name not in self._served
        assert name not in self._retired
        self._served[name] = pool

    def retire(self, name: str) -> None:
        """Let no new requests come to a model; its streams can still be read and cancelled."""
        self._retired[name] = self._served.pop(name)

    def remove(self, name: str) -> None:
        """Forget a model and its streams, whether it is served or retired; it may be gone already."""
        self._served.pop(name, None)
        self._retired.pop(name, None)

    def find(self, model: str) -> tuple[str, WorkerPool]:
        """Find the model that a request names; the default for none.

        Raises:
            ModelNotFoundError: it is not served.

        """
        name = model or self.default
        pool = self._served.get(name)
        if pool is None:
            raise ModelNotFoundError(name, self.names)
        return name, pool

    def check_served(self, name: str, pool: WorkerPool) -> None:
        """Make sure, after a wait, that a model is still served by the same pool.

        Raises:
            ModelNotFoundError: it is not.

        """
        if self._served.get(name) is not pool:
            raise ModelNotFoundError(name, self.names)

    @property
    def names(self) -> tuple[str, ...]:
        """The names that requests can give, the default first, then by the alphabet."""
        return tuple(sorted(self._served, key=lambda name: (name != self.default, name)))

    def served(self) -> list[tuple[str, WorkerPool]]:
        """List what requests can name, the default first."""
        return [(name, self._served[name]) for name in self.names]

    def every(self) -> list[tuple[str, WorkerPool]]:
        """List all whose streams can be read: those that are served and those that are retired."""
        return [*self.served(), *self._retired.items()]

    def __iter__(self) -> Iterator[WorkerPool]:
        return iter([pool for _, pool in self.every()])

    @property
    def healthy(self) -> bool:
        """Whether a model would take a request."""
        return any(pool.healthy for pool in self._served.values())

    @property
    def num_unfinished(self) -> int:
        """Streams whose readers do not have all of them, over all pools."""
        return sum(pool.num_unfinished for pool in self)

    async def drain(self, grace_s: float) -> bool:
        """Take no more requests anywhere and wait for what lives; False if a stream was left and ended."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(pool.drain(grace_s)) for pool in self]
        return all(task.result() for task in tasks)
