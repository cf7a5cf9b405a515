"""Settings of Alpa that minialpa has no equal for: a harmless one gets a warning, any other an error."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from minialpa.errors import ShardingError


@dataclass(frozen=True, slots=True)
class Setting:
    """What happens if a script gives a setting another value than Alpa's default.

    Attributes:
        sentence: why the setting is not needed, or what to use instead.
        is_refused: whether it is an error; else it is a warning.
    """

    sentence: str
    is_refused: bool = False


def check_setting(setting: Setting, name: str, value: Any, *, stacklevel: int) -> None:
    """Warn, or raise ShardingError, since a script sets `name` to a value that is not Alpa's default.

    stacklevel: that of `warnings.warn`, counted from the caller.
    """
    if setting.is_refused:
        raise ShardingError(f"`{name}={value!r}` has no equal in minialpa. {setting.sentence}")
    warnings.warn(f"`{name}={value!r}` has no equal in minialpa. {setting.sentence}", stacklevel=stacklevel + 1)


class Adjustable:
    """Base of options that a script may change after it has made them, as in Alpa, until a step is planned.

    Attributes:
        SETTINGS: fields that minialpa has no equal for; as `field=value`, single values of a field.
        CHOICES: the values that a field may have.
    """

    SETTINGS: ClassVar[Mapping[str, Setting]] = {}
    CHOICES: ClassVar[Mapping[str, Sequence[str]]] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        defaults = {field.name: field.default for field in fields(self)}  # type: ignore[arg-type]
        if name not in defaults:
            raise AttributeError(f"`{type(self).__name__}` has no option `{name}`. It has {', '.join(defaults)}.")
        if value not in self.CHOICES.get(name, (value,)):
            raise ShardingError(f"`{name}` is one of {', '.join(map(repr, self.CHOICES[name]))}; got {value!r}.")

        setting = self.SETTINGS.get(name) or self.SETTINGS.get(f"{name}={value}")
        if setting is not None and value != defaults[name]:
            # The generated `__init__` is one frame more between here and the script.
            is_made = name in vars(self)
            check_setting(setting, name, value, stacklevel=2 if is_made else 3)
        object.__setattr__(self, name, value)
