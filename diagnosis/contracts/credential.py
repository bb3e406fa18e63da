"""How a node proves which node it is: a key of its own, derived from the controller's secret.

The controller holds one secret; the key of node N is HMAC-SHA256(secret, "tocsin-node-v1:N"). A node that loses its
key can be imitated, but it cannot imitate another. Each request carries a MAC over method, path, node, epoch,
counter, age and the body's hash; `counter` rises with every request of a daemon's life (`epoch`), so a recorded
request is worth nothing a second time. Confidentiality is not its purpose.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass
from typing import Final

from diagnosis.contracts.errors import AgentFault

NODE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
SECRET_BYTES_MIN: Final = 32
_HEADER: Final = re.compile(
    r"Tocsin node=(?P<node>[A-Za-z0-9._-]{1,64}), epoch=(?P<epoch>\d{1,19}), counter=(?P<counter>\d{1,19}), "
    r"age_ms=(?P<age_ms>\d{1,15}), mac=(?P<mac>[0-9a-f]{64})",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Claim:
    """What a request says of itself. `age_ms`: time since its content was measured, by the node's own clock."""

    node: str
    epoch: int
    counter: int
    age_ms: int
    mac: str


def node_key(secret: bytes, node: str) -> bytes:
    """The key of one node (32 bytes). Raises ValueError for a name that is no node name or a short secret."""
    if not NODE_NAME.fullmatch(node):
        raise ValueError(f"{node!r} is not a node name")
    if len(secret) < SECRET_BYTES_MIN:
        raise ValueError(f"the secret has {len(secret)} bytes, at least {SECRET_BYTES_MIN} are needed")
    return hmac.digest(secret, b"tocsin-node-v1:" + node.encode(), "sha256")


def _mac(key: bytes, method: str, path: str, claim: tuple[str, int, int, int], body: bytes) -> str:
    node, epoch, counter, age_ms = claim
    text = f"{method} {path}\n{node}\n{epoch}\n{counter}\n{age_ms}\n{hashlib.sha256(body).hexdigest()}"
    return hmac.new(key, text.encode(), "sha256").hexdigest()


def authorization(
    key: bytes, method: str, path: str, *, node: str, epoch: int, counter: int, age_ms: int, body: bytes = b""
) -> str:
    """The Authorization header of a request."""
    mac = _mac(key, method, path, (node, epoch, counter, age_ms), body)
    return f"Tocsin node={node}, epoch={epoch}, counter={counter}, age_ms={age_ms}, mac={mac}"


def read_claim(header: str) -> Claim:
    """The claim of a header, not yet verified. Raises AgentFault (reason `credential`)."""
    match = _HEADER.fullmatch(header)
    if match is None or not NODE_NAME.fullmatch(match["node"]):
        raise AgentFault("no usable Authorization header", reason="credential")
    return Claim(match["node"], int(match["epoch"]), int(match["counter"]), int(match["age_ms"]), match["mac"])


def verify(secret: bytes, method: str, path: str, claim: Claim, body: bytes = b"") -> None:
    """Raises AgentFault (reason `credential`) unless the claim was made with the node's own key."""
    key = node_key(secret, claim.node)
    expected = _mac(key, method, path, (claim.node, claim.epoch, claim.counter, claim.age_ms), body)
    if not hmac.compare_digest(expected, claim.mac):
        raise AgentFault(f"the credential does not prove node {claim.node}", reason="credential")
