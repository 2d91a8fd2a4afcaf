"""Processor time of processes."""

import psutil

from streamsrv.bench.errors import BenchError
from streamsrv.config import Address


class CpuClock:
    """Processor time that a process of this machine has used, over all of its threads."""

    def __init__(self, pid: int | None = None) -> None:
        """`pid` is the process; None is this one.

        Raises:
            BenchError: there is no such process here.
        """
        self._pid = pid
        try:
            self._process = psutil.Process(pid)
        except psutil.NoSuchProcess:
            raise BenchError(
                f"there is no process {pid} on this machine; --server-pid takes the server's process id, "
                "and only where it runs on the machine that measures"
            ) from None

    def seconds(self) -> float:
        """Seconds used so far, in user and kernel mode.

        Raises:
            BenchError: the process has ended.
        """
        try:
            times = self._process.cpu_times()
        except psutil.NoSuchProcess:
            raise BenchError(f"process {self._pid} ended while it was being measured") from None
        return float(times.user + times.system)


def listening_pid(address: Address) -> int | None:
    """Find the process of this machine that listens at an address; None if it cannot be told which.

    It cannot where the address is another machine's, or the process another user's.
    """
    if not address.is_loopback:
        return None
    try:
        connections = psutil.net_connections("tcp")
    except psutil.Error:  # some systems tell only their administrator
        return None
    pids = {
        connection.pid
        for connection in connections
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == address.port
    }
    return pids.pop() if len(pids) == 1 else None
