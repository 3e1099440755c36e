"""torchvision's CIFAR, which starts without comparing checksums."""

from typing import ClassVar

from torchvision.datasets import CIFAR10, CIFAR100


class Cifar10(CIFAR10):
    # torchvision compares the checksum of each file at each start. The archive's is compared when it is downloaded.
    train_list: ClassVar = [[name, None] for name, _ in CIFAR10.train_list]
    test_list: ClassVar = [[name, None] for name, _ in CIFAR10.test_list]
    meta: ClassVar = {**CIFAR10.meta, "md5": None}


class Cifar100(CIFAR100):
    train_list: ClassVar = [[name, None] for name, _ in CIFAR100.train_list]
    test_list: ClassVar = [[name, None] for name, _ in CIFAR100.test_list]
    meta: ClassVar = {**CIFAR100.meta, "md5": None}
