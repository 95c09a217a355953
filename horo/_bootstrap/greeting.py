"""The first thing that ranks tell each other in a store that authenticates no client: a fresh nonce of each.

``HORO_SECRET`` may serve several jobs, or one that is started again and again under the same name. What was written, or
proven in a handshake, in another start must be worth nothing in this one, also if somebody has kept it and puts it
into the store again.
"""

from __future__ import annotations

import hmac
import secrets

from horo._bootstrap.rendezvous import Rendezvous

__all__ = ["greet"]

_TOPIC = "nonce"
_NONCE_BYTES = 32


def greet(rendezvous: Rendezvous, secret: bytes | None) -> bytes:
    """Waits for the nonces of all ranks, and makes from them the secret of this start.

    Each rank uses its own nonce as it has drawn it, not as it stands in the store: whoever changes one brings ranks to
    different secrets, and nobody can bring a rank to one of an earlier start.

    Args:
        rendezvous: of this purpose only.
        secret: of the job; None: the nonces alone make it, so who can read the store knows it.

    Raises:
        As ``Rendezvous.gather``, and as the store does where a value has a wrong MAC.
    """
    rendezvous.enter()
    nonce = secrets.token_bytes(_NONCE_BYTES)
    rendezvous.publish(_TOPIC, nonce)
    nonces = rendezvous.gather(_TOPIC)
    nonces[rendezvous.rank] = nonce
    lengths = b"".join(len(other).to_bytes(4, "big") for other in nonces)
    return hmac.digest(secret or bytes(_NONCE_BYTES), b"horo start\0" + lengths + b"".join(nonces), "sha256")
