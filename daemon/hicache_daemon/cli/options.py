"""Options that several commands share, and how they turn into settings."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hicache_daemon.cli.output import EXIT_USAGE, emit

if TYPE_CHECKING:
    from hicache_daemon.config.settings import ConfigError, Loaded

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", "-c", metavar="FILE", envvar="HICACHE_CONFIG", help="YAML file; without it, the defaults."
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="SECTION.KEY=VALUE", help="Override one key; may be repeated."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout and nothing else.")]
TimeoutOption = Annotated[
    float, typer.Option("--timeout", min=0.1, max=600.0, help="Seconds to wait for the daemon.")
]


def error_items(errors: "tuple[ConfigError, ...]") -> list[dict[str, object]]:
    """Findings as JSON."""
    return [
        {"key": e.key, "line": e.line, "where": e.where, "message": e.message, "remedy": e.remedy} for e in errors
    ]


def tell_warnings(loaded: "Loaded") -> None:
    """Odd but allowed settings, on stderr."""
    for warning in loaded.warnings:
        typer.secho(f"warning: {warning}", fg=typer.colors.YELLOW, err=True)


def load(config: Path | None, overrides: list[str] | None, as_json: bool) -> "Loaded":
    """Settings, or exit 2 with everything that is wrong with them."""
    from hicache_daemon.config.settings import ConfigErrors, load_settings

    try:
        return load_settings(config, overrides or ())
    except ConfigErrors as error:
        count = len(error.errors)
        sum_up = f"{count} configuration error{'s' * (count > 1)}"
        if as_json:
            head = {"code": "config", "message": sum_up, "remedy": "see `errors`: each has a remedy of its own"}
            source = str(config) if config else None
            emit({"error": head, "valid": False, "source": source, "errors": error_items(error.errors)})
        else:
            for item in error.errors:
                typer.secho(str(item), fg=typer.colors.RED, err=True)
            typer.secho(sum_up, fg=typer.colors.RED, bold=True, err=True)
        raise typer.Exit(EXIT_USAGE) from None
