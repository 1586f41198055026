"""Makes ranks of a training job end in named ways; on the PYTHONPATH of the whole job.

    ENDINGS="RANK@WHEN:HOW[:thread];..."     WHEN: an iteration; `load`; `mpi`: as MPI starts

HOW is one of WAYS. Each ending happens once: the moment is written into a file named after the rank
in the folder ENDED, and a rank that has one there goes on.
"""

import ctypes
import importlib.machinery
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path


class LeaveTheScript(BaseException):
    """The training loop returns, as if training were over."""


def leave_the_script():
    raise LeaveTheScript


def raise_an_error():
    raise ZeroDivisionError("as any bug would")


def run_out_of_memory():
    resource.setrlimit(resource.RLIMIT_AS, (1 << 20, resource.RLIM_INFINITY))
    bytearray(1 << 30)


def kill_the_parent():
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


def fill_the_disk():
    """Not an end: no file of this rank may grow from here on."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))


WAYS = {
    "return": leave_the_script,
    "exception": raise_an_error,
    "sys.exit(0)": lambda: sys.exit(0),
    "os._exit(0)": lambda: os._exit(0),
    "os._exit(1)": lambda: os._exit(1),
    "abort": os.abort,
    "segmentation fault": lambda: ctypes.string_at(0),
    "out of memory": run_out_of_memory,
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGKILL to its parent": kill_the_parent,
    "full disk": fill_the_disk,
}
RANK = os.environ.get("OMPI_COMM_WORLD_RANK", "")
MARK = Path(os.environ.get("ENDED", "/nowhere")) / RANK


def ending_of_this_rank():
    for item in filter(None, os.environ.get("ENDINGS", "").split(";")):
        where, how, *thread = item.split(":")
        rank, _, when = where.partition("@")
        if rank == RANK and not MARK.exists():
            return when, how, bool(thread)
    return None, None, False


def end(how, in_thread):
    MARK.write_text(repr(time.time()))
    if not in_thread:
        WAYS[how]()
        return
    threading.Thread(target=WAYS[how]).start()
    time.sleep(60)


def change(module, when, how, in_thread):
    build, step, train = module.build_optimizer, module.train_step, module.train

    def build_optimizer(*args):
        if when == "load":
            end(how, in_thread)
        return build(*args)

    def train_step(forward_step, *more):
        def ending_forward_step(*data):
            if when == str(module.get_args().curr_iteration + 1) and not MARK.exists():
                end(how, in_thread)
            return forward_step(*data)

        return step(ending_forward_step, *more)

    def training(*args):
        try:
            train(*args)
        except LeaveTheScript:
            return

    module.build_optimizer, module.train_step, module.train = (
        build_optimizer,
        train_step,
        training,
    )


class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        when, how, in_thread = ending_of_this_rank()
        if when == "mpi" and name == "recover_megatron.collectives.openmpi":
            end(how, in_thread)
        if when is None or name != "recover_megatron.examples.gpt.training":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            change(module, when, how, in_thread)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder)
