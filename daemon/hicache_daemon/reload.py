"""SIGHUP: read the configuration again, apply what may change while the daemon runs, name what may not.

file is bad        the present settings stay, every error is logged
hot key changed    applied now
other key changed  logged as needing a restart; its present value stays in force and in `Describe config`
"""

from collections.abc import Callable, Mapping
from typing import Any

from hicache_daemon.config.settings import ConfigErrors, Loaded, Settings, changed_keys, flatten

ConfigSource = Callable[[], Loaded]


class Reloader:
    """Holds the settings in force. All calls on the loop thread."""

    def __init__(
        self,
        settings: Settings,
        source: ConfigSource | None,
        appliers: Mapping[str, Callable[[Any], None]],
        log: Any,
    ) -> None:
        """`source` reads the configuration anew. `appliers`: hot key to what puts its new value in force."""
        self._source = source
        self._appliers = appliers
        self._log = log
        self._values = flatten(settings)
        self._settings = settings

    def values(self) -> dict[str, Any]:
        """Dotted key to the value in force."""
        return dict(self._values)

    def reload(self) -> None:
        """Never raises for what the operator wrote."""
        if self._source is None:
            self._log.warning("config.reload_ignored", reason="the daemon was started without a configuration source")
            return
        try:
            fresh = self._source().settings
        except ConfigErrors as error:
            self._log.error("config.reload_refused", errors=[str(item) for item in error.errors])
            return
        hot, cold = changed_keys(self._settings, fresh)
        new, applied = flatten(fresh), list[str]()
        for key in hot:
            apply = self._appliers.get(key)
            if apply is None:
                cold.append(key)
                continue
            section, _, name = key.partition(".")
            apply(getattr(getattr(fresh, section), name))
            self._values[key] = new[key]
            applied.append(key)
        # Only applied keys move the baseline: a cold key stays reported at each reload until the restart.
        for section in {key.partition(".")[0] for key in applied}:
            names = {key.partition(".")[2] for key in applied if key.startswith(section + ".")}
            update = {name: getattr(getattr(fresh, section), name) for name in names}
            changed = getattr(self._settings, section).model_copy(update=update)
            self._settings = self._settings.model_copy(update={section: changed})
        self._log.info("config.reloaded", applied=applied, need_restart=sorted(cold))
