"""Derives the secret of a start from fresh nonces of all ranks, in a store that authenticates no client.

``HORO_SECRET`` may serve several jobs, or one that is started repeatedly under the same name. A value or a proof from
another start must not be valid in this one, even if an attacker has recorded it and writes it to the store again.
"""

from __future__ import annotations

import hmac
import secrets

from horo._bootstrap.rendezvous import Rendezvous

__all__ = ["derive_start_secret"]

_TOPIC = "nonce"
_NONCE_BYTES = 32


def derive_start_secret(rendezvous: Rendezvous, secret: bytes | None) -> bytes:
    """Waits for the nonces of all ranks, and derives the secret of this start from them.

    Each rank uses its own nonce as drawn, not as read from the store: a changed nonce gives the ranks different
    secrets, and no change of the store can give a rank the secret of an earlier start.

    Args:
        rendezvous: a rendezvous for this purpose only.
        secret: the job's secret. None: only the nonces determine the result, so each reader of the store can derive it.

    Raises:
        As ``Rendezvous.gather``, and as the store if a value has a wrong MAC.
    """
    rendezvous.enter()
    nonce = secrets.token_bytes(_NONCE_BYTES)
    rendezvous.publish(_TOPIC, nonce)
    nonces = rendezvous.gather(_TOPIC)
    nonces[rendezvous.rank] = nonce
    lengths = b"".join(len(other).to_bytes(4, "big") for other in nonces)
    return hmac.digest(secret or bytes(_NONCE_BYTES), b"horo start\0" + lengths + b"".join(nonces), "sha256")
