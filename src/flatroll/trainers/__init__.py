"""Adapters for other libraries' trainers. Import the one you need, such as `flatroll.trainers.sb3`.

Each file needs its trainer installed and imports it; ``import flatroll`` and this file do not.
"""
