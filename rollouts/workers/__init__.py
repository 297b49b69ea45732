"""Collectors whose envs are stepped in other processes and on other machines."""
