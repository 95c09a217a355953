"""Command lines that are right."""

from collections.abc import Sequence
from typing import Any

from horo.runner.cli import parse
from horo.runner.config import Job


def parsed(words: str | Sequence[str], **options: Any) -> Job:
    """The job that the words, or the words of a line, describe; options are those of ``parse``."""
    job = parse(words.split() if isinstance(words, str) else list(words), **options)
    assert job is not None
    return job
