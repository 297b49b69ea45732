"""A pytest plugin, ``-p on_chip_as_cuda``: as ``on_chip``, and flatroll takes the emulated device for CUDA's."""

import chip

chip.install()
chip.translate("flatroll")
