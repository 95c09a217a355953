"""What a forked child of a rank does."""

import os
import pickle
from collections.abc import Callable
from typing import Any


def in_child(act: Callable[[], Any]) -> Any:
    """What ``act()`` returns in a forked child, which must end well."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.write(writer, pickle.dumps(act()))
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        answer = stream.read()
    assert os.waitpid(child, 0) == (child, 0)
    return pickle.loads(answer)
