"""`recover-megatron doctor`: is this machine fit? In plain words, with what to do if it is not."""
import argparse
def add_arguments(parser): pass
def run(args): return 0
