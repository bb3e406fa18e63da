"""The stop for everything: `<state_dir>/paused.json`. While the file exists nothing is done to the cluster.

A file and not a row, because it must work when the controller is dead: `touch paused.json` pauses as well as
`tocsin pause` does. It is read again before every act. Whatever is wrong with it (empty, garbage, unreadable) means
paused: in doubt nothing is done.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Final

import msgspec

from diagnosis.contracts.errors import OperatorFault

FILE_NAME: Final = "paused.json"
WHY_CHARS_MAX: Final = 500
_FILE_BYTES_MAX: Final = 16 << 10


class PauseState(msgspec.Struct, frozen=True, kw_only=True):
    """Who paused, why, and when (seconds since the epoch). None: the file does not tell."""

    who: str | None = None
    why: str | None = None
    at: float | None = None


class Pause:
    """The pause file of one state directory."""

    def __init__(self, state_dir: Path) -> None:
        self.path = state_dir / FILE_NAME

    def state(self) -> PauseState | None:
        """None: not paused. Never raises."""
        try:
            with self.path.open("rb") as file:
                data = file.read(_FILE_BYTES_MAX)
            return msgspec.json.decode(data, type=PauseState)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError, RecursionError):
            return PauseState()

    def pause(self, who: str, why: str, at: float) -> PauseState:
        """Write the file, durably; on a full disk an empty one, which pauses too.

        Raises OperatorFault when the directory cannot be written.
        """
        state = PauseState(who=who, why=why[:WHY_CHARS_MAX], at=at)
        part = self.path.with_name(FILE_NAME + ".part")
        try:
            try:
                with part.open("wb") as file:
                    file.write(msgspec.json.encode(state))
                    file.flush()
                    os.fsync(file.fileno())
                part.replace(self.path)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                self.path.touch()
            self._sync_directory()
        except OSError as error:
            raise OperatorFault(f"{self.path}: {error.strerror}: not paused", reason="pause") from error
        return state

    def resume(self) -> bool:
        """Remove the file, durably. False: it was not there. Raises OperatorFault when it cannot be removed."""
        try:
            self.path.unlink()
            self._sync_directory()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise OperatorFault(f"{self.path}: {error.strerror}: still paused", reason="pause") from error
        return True

    def _sync_directory(self) -> None:
        fd = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
