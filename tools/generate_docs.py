"""Write everything that is generated from code; with `--check`, only say what is stale, and exit 1 if anything is."""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def generated() -> dict[str, str]:
    """Path below the repository's root to the text that belongs there."""
    from hicache_daemon.cli.reference import cli_markdown
    from hicache_daemon.config.schema import default_yaml, json_schema, reference_markdown

    return {
        "configs/default.yaml": default_yaml(),
        "configs/schema.json": json.dumps(json_schema(), indent=2) + "\n",
        "docs/operate/configuration.md": reference_markdown(),
        "docs/operate/cli.md": cli_markdown(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing")
    check = parser.parse_args().check
    stale = [
        name for name, text in generated().items() if not (ROOT / name).is_file() or (ROOT / name).read_text() != text
    ]
    for name in stale:
        print(f"{'stale' if check else 'wrote'} {name}")
        if not check:
            (ROOT / name).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / name).write_text(generated()[name])
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
