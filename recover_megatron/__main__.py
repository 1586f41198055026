"""`python -m recover_megatron SCRIPT FLAGS`: see adapters/megatron/bootstrap.py."""

import sys

from recover_megatron.adapters.megatron.bootstrap import main as _main

if __name__ == "__main__":
    _main(sys.argv[1:], sys.modules["__main__"].__dict__)
