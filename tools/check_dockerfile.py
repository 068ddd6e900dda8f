"""Run a Dockerfile's steps without a Docker engine: each stage in a clean Debian root made with debootstrap.

Shown: every RUN and COPY works from nothing, the image's user can start the entry point, the health check turns
green, SIGTERM ends it with 0. Not shown: layers, image size, cgroups, seccomp, networks, volumes' owners.

Needs root and `debootstrap`. Takes some minutes and about 1 GB below --work. Certificates, apt sources, apt
configuration and proxy variables come from this machine, so that its mirrors are used.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

CONTEXT = Path(__file__).resolve().parent.parent
BASE_IMAGE = re.compile(r"debian:(\w+)-slim")
PASSED_ON = re.compile(r"(?i)^(https?_proxy|no_proxy|pip_index_url)$")
HOST_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
CERTIFICATES = "/etc/host-certificates.pem"  # apart, since installing ca-certificates writes its own bundle anew
HEALTHY_WITHIN_S = 60
STOPPED_WITHIN_S = 60


@dataclass
class Stage:
    """One FROM and what followed it."""

    root: Path
    env: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = "root"
    entrypoint: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)

    def command(self, argv: list[str]) -> list[str]:
        """`argv` inside the root, as the stage's user, in its folder."""
        base = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
        outer = {name: value for name, value in os.environ.items() if PASSED_ON.match(name)}
        if (self.root / CERTIFICATES.lstrip("/")).exists():
            outer |= dict.fromkeys(("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"), CERTIFICATES)
        pairs = [f"{name}={value}" for name, value in (base | outer | self.env).items()]
        chroot = ["chroot", *([] if self.user == "root" else [f"--userspec={self.user}"]), str(self.root)]
        inner = f"cd {shlex.quote(self.workdir)} && exec {shlex.join(argv)}"
        return [*chroot, "/usr/bin/env", "-i", *pairs, "/bin/sh", "-c", inner]


def say(text: str) -> None:
    print(text, flush=True)


def instructions(text: str) -> list[tuple[str, str]]:
    """(keyword, arguments) of each instruction; continuation lines joined, comments dropped."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [
        (word.upper(), rest.strip())
        for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)
    ]


class Build:
    """Stages by name, on disk below `work`."""

    def __init__(self, work: Path, mirror: str) -> None:
        self.work = work
        self.mirror = mirror
        self.stages: dict[str, Stage] = {}
        self.steps = 0

    def base(self, suite: str) -> Path:
        """A minimal Debian, made once."""
        root = self.work / f"base-{suite}"
        if not (root / "bin/sh").exists():
            say(f"debootstrap {suite}")
            subprocess.run(
                ["debootstrap", "--variant=minbase", suite, str(root), self.mirror],
                check=True,
                stdout=subprocess.DEVNULL,
            )
        return root

    def start(self, arguments: str) -> Stage:
        image, _, name = arguments.partition(" AS ")
        found = BASE_IMAGE.fullmatch(image.strip())
        if found is None:
            raise SystemExit(f"FROM {image}: only debian:<suite>-slim can be made here")
        root = self.work / f"stage-{len(self.stages)}"
        subprocess.run(["cp", "--archive", "--reflink=auto", str(self.base(found[1])), str(root)], check=True)
        if HOST_CERTIFICATES.exists():
            shutil.copyfile(HOST_CERTIFICATES, root / CERTIFICATES.lstrip("/"))
        for path in ("etc/apt/apt.conf.d", "etc/apt/sources.list.d", "etc/resolv.conf", "etc/hosts"):
            source = Path("/") / path
            if source.is_dir():
                shutil.copytree(source, root / path, dirs_exist_ok=True)
            elif source.exists():
                shutil.copyfile(source, root / path)
        if (root / "etc/apt/sources.list.d/debian.sources").exists():
            (root / "etc/apt/sources.list").write_text("")
        for name_, kind in (("proc", ["-t", "proc", "proc"]), ("dev", ["--rbind", "/dev"])):
            subprocess.run(["mount", *kind, str(root / name_)], check=True)
        stage = Stage(root)
        self.stages[name.strip() or str(len(self.stages))] = stage
        return stage

    def copy(self, stage: Stage, arguments: str) -> None:
        words = shlex.split(arguments)
        origin = CONTEXT
        if words[0].startswith("--from="):
            origin = self.stages[words.pop(0).removeprefix("--from=")].root
        *sources, target = words
        into = stage.root / os.path.join(stage.workdir, target).lstrip("/")
        for source in sources:
            path = origin / source.lstrip("/")
            if path.is_dir():
                skip = shutil.ignore_patterns("__pycache__", "*.egg-info", ".venv*")
                shutil.copytree(path, into, symlinks=True, dirs_exist_ok=True, ignore=skip)
            else:
                place = into / path.name if target.endswith("/") else into
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, place)

    def step(self, stage: Stage, word: str, rest: str) -> None:
        if word == "RUN":
            subprocess.run(stage.command(["/bin/sh", "-ec", rest]), check=True)
            self.steps += 1
        elif word == "COPY":
            self.copy(stage, rest)
            self.steps += 1
        elif word == "ENV":
            name, _, value = rest.partition("=")
            stage.env[name] = value
        elif word == "WORKDIR":
            stage.workdir = rest
            (stage.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif word == "USER":
            stage.user = rest
        elif word == "ENTRYPOINT":
            stage.entrypoint = json.loads(rest)
        elif word == "HEALTHCHECK":
            stage.health = json.loads(rest.partition("CMD")[2])
        elif word not in {"VOLUME", "STOPSIGNAL", "EXPOSE", "LABEL"}:
            raise SystemExit(f"{word}: not known here")

    def close(self) -> None:
        """Unmount; lazily, since a failed step may have left a process behind."""
        for stage in self.stages.values():
            for name in ("dev", "proc"):
                subprocess.run(["umount", "--recursive", "--lazy", str(stage.root / name)], check=False)


def try_image(stage: Stage, options: list[str]) -> None:
    """Start the entry point, wait until it is healthy, end it."""
    daemon = subprocess.Popen(stage.command([*stage.entrypoint, *options]))
    try:
        deadline = time.monotonic() + HEALTHY_WITHIN_S
        while subprocess.run(stage.command(stage.health), capture_output=True, check=False).returncode:
            if daemon.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"never became healthy (exit code {daemon.poll()})")
            time.sleep(0.5)
        say("healthy; its status:")
        subprocess.run(stage.command(stage.health), check=True)
        daemon.send_signal(signal.SIGTERM)
        code = daemon.wait(STOPPED_WITHIN_S)
        if code:
            raise SystemExit(f"SIGTERM: exit code {code}, expected 0")
    finally:
        if daemon.poll() is None:
            daemon.kill()
            daemon.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="folder for the roots; kept. Without it a temporary one, removed")
    parser.add_argument("--mirror", default="http://deb.debian.org/debian")
    parser.add_argument("--build-only", action="store_true", help="run the steps, do not start the daemon")
    given = parser.parse_args()
    work = given.work or Path(tempfile.mkdtemp(prefix="hicache-image-"))
    work.mkdir(parents=True, exist_ok=True)
    for old in work.glob("stage-*"):
        shutil.rmtree(old)
    build = Build(work, given.mirror)
    try:
        stage: Stage | None = None
        for word, rest in instructions((CONTEXT / "Dockerfile").read_text()):
            say(f"{word} {rest[:100]}")
            if word == "FROM":
                stage = build.start(rest)
            elif stage is not None:
                build.step(stage, word, rest)
        if stage is None:
            raise SystemExit("no FROM")
        if not given.build_only:
            try_image(
                stage, ["--set", "l2.size=64MiB", "--set", "l3.enabled=true", "--set", "l3.path=/var/lib/hicache"]
            )
        say(f"{build.steps} steps ran{'' if given.build_only else '; the daemon started, was healthy and stopped'}")
    finally:
        build.close()
        if given.work is None:
            shutil.rmtree(work)
    return 0


if __name__ == "__main__":
    sys.exit(main())
