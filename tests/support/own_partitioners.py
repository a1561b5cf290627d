"""Partitioners of a caller's own, for tests: they are known by their names."""




def by_region(key: bytes, partitions: int) -> int:
    return 0


def by_tenant(key: bytes, partitions: int) -> int:
    return 0
