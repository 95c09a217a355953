"""Derives a fresh secret for each start, in a store that authenticates no client.

``HORO_SECRET`` may serve several jobs, or one that is started repeatedly under the same name. A value or a proof from
another start must not be valid in this one, even if an attacker has recorded it and writes it to the store again.
"""

from __future__ import annotations

import hmac
import secrets

from horo.bootstrap.rendezvous import Rendezvous
from horo.bootstrap.store.signed import of_another_start

__all__ = ["derive_start_secret"]

_TOPIC = "nonce"
_NONCE_BYTES = 32


def derive_start_secret(rendezvous: Rendezvous, secret: bytes | None) -> bytes:
    """Sends a nonce to rank 0, and derives the secret of this start from what rank 0 draws for it.

    Rank 0 draws a seed when it has the nonces of all ranks, and sends it to each together with the nonce of that rank.
    A rank takes a seed only with its own nonce as drawn, not as read from the store: no change of the store can give it
    the seed of an earlier start.

    Args:
        rendezvous: a rendezvous for this purpose only.
        secret: the job's secret. None: only the seed determines the result, so each reader of the store can derive it.

    Raises:
        As ``Rendezvous.gather``, and as the store if a value has a wrong MAC or is of another start.
    """
    rendezvous.enter()
    nonce = secrets.token_bytes(_NONCE_BYTES)
    rendezvous.publish(_TOPIC, nonce)
    if rendezvous.rank == 0:
        seed = secrets.token_bytes(_NONCE_BYTES)
        for rank, other in enumerate(rendezvous.gather(_TOPIC)[1:], 1):
            rendezvous.send(f"seed/{rank}", other + seed)
    else:
        key = f"seed/{rendezvous.rank}"
        answer = rendezvous.receive(key, _TOPIC)
        if not hmac.compare_digest(answer[:_NONCE_BYTES], nonce):
            raise of_another_start(key)
        seed = answer[_NONCE_BYTES:]
    return hmac.digest(secret or bytes(_NONCE_BYTES), b"horo start\0" + seed, "sha256")
