"""Address of the gateway, and its URL for agents."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from toolrl.servers.serving import ServingConfig
from verl.errors import ConfigError

_MAX_BODY_MIB = 32
_MAX_REQUESTS = 1 << 16
_EVERY_INTERFACE = ("", "0.0.0.0", "::")


@dataclass(frozen=True)
class Address:
    """port: 0 for a free one; url: as agents see it, if a proxy or another name leads there"""

    host: str
    port: int
    url: str | None = None

    @property
    def base_url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self.url or f"http://{host}:{self.port}"

    @property
    def serving(self) -> ServingConfig:
        names = () if self.url is None else (urlsplit(self.url).hostname or "",)
        return ServingConfig(
            self.host, self.port, allow_hosts=names, max_body_mib=_MAX_BODY_MIB, max_requests=_MAX_REQUESTS
        )


LOOPBACK = Address("127.0.0.1", 0)


def check_address(host: str, port: int, url: str | None) -> Address:
    """Raises ConfigError."""
    if not 0 <= port < 1 << 16:
        raise ConfigError(f"env.options.port must be from 0 to 65535, got {port}")
    if url is not None and not (url.startswith(("http://", "https://")) and urlsplit(url).hostname):
        raise ConfigError(f"env.options.url={url} must be as http://trainer:8100")
    if url is None and host in _EVERY_INTERFACE:
        raise ConfigError(f"env.options.host={host} is no address for agents: set env.options.url, too")
    return Address(host, port, None if url is None else url.rstrip("/"))
