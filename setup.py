"""What setup.cfg cannot say: the folder `scripts` is installed as `megatron.scripts`. Everything else is there."""

from setuptools import find_namespace_packages, setup

setup(packages=[*find_namespace_packages(include=["megatron*", "mpu*", "data*"]), "megatron.scripts",
                "megatron.scripts.configs"],
      package_dir={"megatron.scripts": "scripts"})
