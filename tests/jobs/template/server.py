"""A template of a rank: it has imported torch and Megatron once, and forks whoever asks.

Two thirds of a small job's time is its ranks' imports: 3 s of a core for each. The suite therefore
starts one template (tests/conftest.py), and sitecustomize.py beside this file lets `python -m
recover_megatron` be forked from it:

    mpirun -- python (stays, tiny) ==socket== template -- fork: watchdog -- rank

The small process passes on signals, and ends as the watchdog has ended. If it is killed, the
template kills the watchdog. The forked process runs the very same program.

    python server.py SOCKET
"""

from __future__ import annotations

import array
import contextlib
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import sys


def preload() -> None:
    from recover_megatron.adapters.megatron import cpu

    cpu.install_torch()
    cpu.install_core()

    import recover_megatron.examples.gpt.training  # noqa: F401


class Template:
    def __init__(self, path: str):
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(path)
        self._server.listen(64)
        self._ready = selectors.DefaultSelector()
        self._ready.register(self._server, selectors.EVENT_READ, self._accept)

    def serve(self) -> None:
        while True:
            for key, _ in self._ready.select():
                key.data()

    def _accept(self) -> None:
        asker, _ = self._server.accept()
        received = array.array("i")
        head, more, _, _ = asker.recvmsg(4, socket.CMSG_SPACE(3 * received.itemsize))
        for _, _, data in more:
            received.frombytes(data)
        text = b""
        size = int.from_bytes(head, "big")
        while len(text) < size:
            text += asker.recv(size - len(text))
        child = os.fork()
        if not child:
            self._become(json.loads(text), received)
        for fd in received:
            os.close(fd)
        asker.sendall(f"{child}\n".encode())
        ended = os.pidfd_open(child)

        def tell() -> None:
            """The watchdog has ended, or who asked for it."""
            for each in (ended, asker):
                self._ready.unregister(each)
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(ended, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            with contextlib.suppress(OSError):
                asker.sendall(f"{status}\n".encode())
            asker.close()
            os.close(ended)

        self._ready.register(ended, selectors.EVENT_READ, tell)
        self._ready.register(asker, selectors.EVENT_READ, tell)

    def _become(self, order: dict, fds: array.array) -> None:
        """The program that was to be started."""
        for target, fd in enumerate(fds):
            os.dup2(fd, target)
        os.closerange(3, 256)
        os.setsid()
        os.chdir(order["directory"])
        os.environ.clear()
        os.environ.update(order["environment"])
        sys.argv = ["-m", *order["words"]]
        sys.orig_argv = [sys.executable, "-m", order["module"], *order["words"]]
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", closefd=False, errors="backslashreplace")  # noqa: SIM115
        sys.path[:0] = order["path"]
        code = 1
        try:
            module = sys.modules["__main__"]
            module.__dict__.clear()
            module.__dict__.update(__name__="__main__", __builtins__=__builtins__)
            runpy._run_module_as_main(order["module"])
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
        except BaseException:  # noqa: BLE001
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def main(path: str) -> None:
    preload()
    gc.collect()
    gc.freeze()
    Template(path).serve()


if __name__ == "__main__":
    import server  # this file again, since a forked process clears its main module

    server.main(sys.argv[1])
