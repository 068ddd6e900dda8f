"""Findings about a configuration: each names its key, where it was written, and what to do."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ConfigError:
    """`where` is `file.yaml:12`, an environment variable or a `--set` option; `line` only for a file."""

    key: str
    line: int | None
    message: str
    remedy: str = ""
    where: str = ""

    def __str__(self) -> str:
        text = f"{self.key}: {self.message}" if self.key else self.message
        text = f"{self.where}: {text}" if self.where else text
        return f"{text} — {self.remedy}" if self.remedy else text


class ConfigErrors(Exception):
    """Everything that is wrong, not the first of it."""

    def __init__(self, errors: Sequence[ConfigError]) -> None:
        super().__init__("\n".join(str(error) for error in errors))
        self.errors = tuple(errors)
