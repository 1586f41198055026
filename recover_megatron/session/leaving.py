"""How a rank ends: in order, with the whole world; by its own error; or alone, and then it dies.

                    all ranks agree on "end"
finish(code)  ------------------------------------->  exit code written, process exits
     |  `how`: the others may not have ended
     |  not all of them come within PATIENCE_S
     '--------------------------------------------->  SIGKILL: one more lost replica
die(error)    ------------------------------------->  SIGKILL, after the traceback
"""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from recover_megatron.errors import NoQuorum
from recover_megatron.events import Died, Finished
from recover_megatron.session.exits import write_exit_code
from recover_megatron.session.session import Session

# How long a rank that ends by itself waits for all others to end, too, by whether training has
# begun. Before it, ranks that meet the same error meet it apart by as long as they import.
PATIENCE_S = {True: 0.8, False: 15.0}
# How long the leader, with an exception, waits to see whether all others have died of theirs.
_LAST_S = 0.5


def finish(session: Session, code: int, how: str = "") -> NoReturn:
    """The orderly end of a rank whose whole world ends: all live ranks call it.

    Not MPI_Finalize (it hangs after failures): two agreements, then `os._exit(code)`. Between them
    the watch over mates ends, so that no rank takes a mate's exit for a death. Each replica writes
    the exit code into the run folder: mpirun's own is 0 even if every rank was killed.

    Args:
        session: This rank's.
        code: The job's exit code, 0 to 255.
        how: How a rank ends, in words, that did not agree on it with the others, as by sys.exit()
            in the middle of training. If all of them end it is an orderly end; if not, this rank
            dies within PATIENCE_S.
    """
    watch, outputs = session.watch, session.outputs
    watch.watchdog.rest()
    patience = _leave(session, how) if how else None
    session.driver.guarded("end", lambda: None)
    if patience is not None:
        patience.end()
    outputs.trace.emit(Finished(code=code, replicas=session.world.now.replicas))
    watch.mates.leave()
    watch.watcher.stop()
    if outputs.console is not None:
        outputs.console.close()
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(Exception):
        # Not public, but what Python itself runs at an exit: helper processes end.
        multiprocessing.util._run_finalizers()  # type: ignore[attr-defined]
    if session.position == 0:
        write_exit_code(session.config.trace_dir, code)
    if watch.on_host is not None:
        watch.on_host.done(code)
    session.communicator.agree(True, "left")
    watch.watchdog.leaves(code)
    os._exit(code)


def die(session: Session | None, error: BaseException) -> NoReturn:
    """The end of a broken rank: say why, then SIGKILL, the one exit that peers notice at once.
    Nothing that is said on the way can prevent it. `session` is None before there is one."""
    try:
        if session is not None and session.console is not None:
            session.console.speak_up()
        if isinstance(error, NoQuorum):
            print(f"recover: this rank leaves: {error}", file=sys.stderr)
        else:
            traceback.print_exception(error, file=sys.stderr)
        sys.stderr.flush()
        if session is not None:
            session.watchdog.last_words()
            session.trace.emit(_last_words(error, session.progress.iteration))
    finally:
        os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def save_if_last(session: Session | None) -> None:
    """A checkpoint of the last committed iteration, if all other replicas are dead and this one,
    broken by an exception, still holds it whole. Best effort: any error in it changes nothing."""
    try:
        if session is not None and _is_last(session) and session.progress.rescue is not None:
            session.progress.rescue()
    except BaseException:  # noqa: BLE001  the rank dies anyhow, of another error
        traceback.print_exc(file=sys.stderr)


class _Patience:
    """Calls `lost` in a thread of its own, `seconds` after it began last."""

    def __init__(self, seconds: float, lost: Callable[[], None]):
        self._seconds, self._lost = seconds, lost
        self._timer: threading.Timer | None = None

    def begin(self) -> None:
        self.end()
        self._timer = threading.Timer(self._seconds, self._lost)
        self._timer.daemon = True
        self._timer.start()

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def _leave(session: Session, how: str) -> _Patience:
    """Begins an end that the world has not agreed on; what ends it if the others do not end."""

    def lost() -> None:
        session.terminal.say(
            f"replica {session.replica_id}, position {session.position} left {how}, not all with it"
        )
        session.communicator.die(f"left {how}, not all with it")

    patience = _Patience(PATIENCE_S[session.progress.iteration > 0], lost)
    session.world.on_change(lambda world: patience.begin())
    patience.begin()
    session.communicator.leave(f"left {how}")
    return patience


def _is_last(session: Session) -> bool:
    """True if all other replicas are dead: known now, or, if this one leads and in training, within
    a moment. So of replicas that all meet the same error one can still save."""
    others = session.layout.ranks_in(session.world.now.replicas)
    others -= set(session.layout.ranks_of(session.replica_id))
    waits = session.leading and session.progress.iteration
    limit = time.monotonic() + (_LAST_S if waits else 0.0)
    while not others <= session.communicator.failed():
        if time.monotonic() > limit:
            return False
        time.sleep(0.01)
    return True


def _last_words(error: BaseException, iteration: int) -> Died:
    """What the launcher needs to see that all replicas died of the same error."""
    frames = traceback.extract_tb(error.__traceback__)
    said = str(error).strip().splitlines()
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "nowhere"
    line = (frames[-1].line or "") if frames else ""
    # A bare assert says nothing but its line.
    words = said[0] if said and said[0].strip("; ") else line
    return Died(
        reason=f"{type(error).__name__}: {words}",
        exception=type(error).__name__,
        where=place,
        iteration=iteration,
    )
