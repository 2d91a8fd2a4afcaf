"""The server to be loaded, in a form that can be handed to another process."""

from dataclasses import dataclass, field
from pathlib import Path

from streamsrv.bench.load import load_client
from streamsrv.client import Client
from streamsrv.config import Address
from streamsrv.tls import KeyPair, channel_credentials


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server is, and how to connect."""

    address: Address
    tls: bool = False
    ca: Path | None = None
    """Authorities to trust, with `tls`; None for this system's."""
    pair: KeyPair | None = None
    """A certificate to show, with `tls`."""
    api_key: str | None = field(default=None, repr=False)

    def connect(self) -> Client:
        """Make a client that hides nothing.

        Raises:
            SettingsError: a file of the TLS settings is unusable.
        """
        credentials = channel_credentials(ca=self.ca, pair=self.pair) if self.tls else None
        return load_client(str(self.address), credentials=credentials, api_key=self.api_key)
