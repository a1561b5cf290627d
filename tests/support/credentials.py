"""Credentials of tests: certificates that nothing but these tests trusts, with their private keys, and shared keys."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from loglib.copies import CopyCredentials, SourceCredentials

__all__ = ["ENCRYPTED", "EXPIRED", "GOOD", "KEY", "KEY2", "MIDDLE", "OTHER", "Paths", "made", "secret"]


class Paths(NamedTuple):
    """The files of a source and its copies."""

    certificate: Path
    private_key: Path
    shared_key: Path

    def source(self) -> SourceCredentials:
        return SourceCredentials(**self._asdict())

    def copy(self) -> CopyCredentials:
        return CopyCredentials(shared_key=self.shared_key, authority=self.certificate)


def made(directory: Path, certificate: str | None = None) -> Paths:
    """The files, with a certificate for localhost and its addresses."""
    directory.mkdir(exist_ok=True)
    path = directory / "certificate.pem"
    path.write_text(GOOD if certificate is None else certificate)
    private = secret(directory / "private.pem", KEY2 if certificate == MIDDLE else KEY)
    return Paths(path, private, secret(directory / "mirror.key", "0123456789abcdef" * 4))


def secret(path: Path, content: str) -> Path:
    path.touch(0o600)
    path.write_text(content)
    return path


# Elliptic curve P-256. KEY2 belongs to MIDDLE, and KEY to all others. They are for localhost until 2124, but EXPIRED,
# which ended in 2021, and OTHER, which is for elsewhere.example.
KEY = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQg8xKS8nU8uqAWR/h7
KUw2lxabcYiGi/0ygonwK335IImhRANCAAS5MFPmoSGmd4BPAT4EY4l9VuuAtNze
4UPRmfGFHu7p/tEfT9zRvHrs/7qkHKiV/OFIIm6k+Jz2Xue2gCJXoaSA
-----END PRIVATE KEY-----
"""
GOOD = """\
-----BEGIN CERTIFICATE-----
MIIBkzCCATmgAwIBAgIUUaFr7WTqTlB7p3d9bs+iAxxa4NwwCgYIKoZIzj0EAwIw
FjEUMBIGA1UEAwwLbG9nbGliIHRlc3QwIBcNMjQwMTAxMDAwMDAwWhgPMjEyNDAx
MDEwMDAwMDBaMBYxFDASBgNVBAMMC2xvZ2xpYiB0ZXN0MFkwEwYHKoZIzj0CAQYI
KoZIzj0DAQcDQgAEuTBT5qEhpneATwE+BGOJfVbrgLTc3uFD0ZnxhR7u6f7RH0/c
0bx67P+6pByolfzhSCJupPic9l7ntoAiV6GkgKNjMGEwLAYDVR0RBCUwI4IJbG9j
YWxob3N0hwR/AAABhxAAAAAAAAAAAAAAAAAAAAABMBIGA1UdEwEB/wQIMAYBAf8C
AQAwHQYDVR0OBBYEFN09FIxJjsKDYXD4XDPBn++dlfckMAoGCCqGSM49BAMCA0gA
MEUCICiMfcPc8CiICYF37KsExSWvv0HbIzoi19a40xJkD26kAiEA/lyWsdpc4C4c
ekkRFFLN5IOZwz3XajjkxRoCHTqpKbc=
-----END CERTIFICATE-----
"""
EXPIRED = """\
-----BEGIN CERTIFICATE-----
MIIBkTCCATegAwIBAgIUE7DySMorxETzSSb6QExuozT+QG8wCgYIKoZIzj0EAwIw
FjEUMBIGA1UEAwwLbG9nbGliIHRlc3QwHhcNMjAwMTAxMDAwMDAwWhcNMjEwMTAx
MDAwMDAwWjAWMRQwEgYDVQQDDAtsb2dsaWIgdGVzdDBZMBMGByqGSM49AgEGCCqG
SM49AwEHA0IABLkwU+ahIaZ3gE8BPgRjiX1W64C03N7hQ9GZ8YUe7un+0R9P3NG8
euz/uqQcqJX84UgibqT4nPZe57aAIlehpICjYzBhMCwGA1UdEQQlMCOCCWxvY2Fs
aG9zdIcEfwAAAYcQAAAAAAAAAAAAAAAAAAAAATASBgNVHRMBAf8ECDAGAQH/AgEA
MB0GA1UdDgQWBBTdPRSMSY7Cg2Fw+FwzwZ/vnZX3JDAKBggqhkjOPQQDAgNIADBF
AiBRDhbgqO5A+GussTGrtV2qjKWBa2C4Hw0yRarjTuIxSQIhAKe2abDx5E2Lf35a
fFDgbZ1QbXSmBjJ2dCedE+5xvjpD
-----END CERTIFICATE-----
"""
OTHER = """\
-----BEGIN CERTIFICATE-----
MIIBiTCCAS+gAwIBAgIUDjDwvABxC2KsK1hK3kSbp6rxxYUwCgYIKoZIzj0EAwIw
FjEUMBIGA1UEAwwLbG9nbGliIHRlc3QwIBcNMjQwMTAxMDAwMDAwWhgPMjEyNDAx
MDEwMDAwMDBaMBYxFDASBgNVBAMMC2xvZ2xpYiB0ZXN0MFkwEwYHKoZIzj0CAQYI
KoZIzj0DAQcDQgAEuTBT5qEhpneATwE+BGOJfVbrgLTc3uFD0ZnxhR7u6f7RH0/c
0bx67P+6pByolfzhSCJupPic9l7ntoAiV6GkgKNZMFcwIgYDVR0RBBswGYIRZWxz
ZXdoZXJlLmV4YW1wbGWHBMAAAgEwEgYDVR0TAQH/BAgwBgEB/wIBADAdBgNVHQ4E
FgQU3T0UjEmOwoNhcPhcM8Gf752V9yQwCgYIKoZIzj0EAwIDSAAwRQIhAOW1mZZk
0v7nlFHDCdXWsJ7g+tjipcszpgRgwp9WRhV3AiBfsctSAIKzzyS6Qxy7JUlnVmW5
WZIEwDbJEdpSsEzlLA==
-----END CERTIFICATE-----
"""
MIDDLE = """\
-----BEGIN CERTIFICATE-----
MIIBgDCCASWgAwIBAgIUK54A8l0z8z5HUxwr26NGwXrw+68wCgYIKoZIzj0EAwIw
GDEWMBQGA1UEAwwNbG9nbGliIG1pZGRsZTAgFw0yNDAxMDEwMDAwMDBaGA8yMTI0
MDEwMTAwMDAwMFowGDEWMBQGA1UEAwwNbG9nbGliIG1pZGRsZTBZMBMGByqGSM49
AgEGCCqGSM49AwEHA0IABCPbDQO4xf44cAEzAq4GdJZtsKpNM9ErVfBA2P6llYL1
ROUCUy3d5CaZTnb38WRrcZe3qWNG8apLMmlMJSffppejSzBJMBQGA1UdEQQNMAuC
CWxvY2FsaG9zdDASBgNVHRMBAf8ECDAGAQH/AgEAMB0GA1UdDgQWBBTDMYxFfcmd
U6xZRgsI2bwXPbZl/zAKBggqhkjOPQQDAgNJADBGAiEAlXzoR9NhRn519vEzgnGy
MNnDZ9IymAGEKaKFj35ONrICIQCf6RpiL2/JO++Zro73YLHz5uikH2qNYiB8yLkV
f286zQ==
-----END CERTIFICATE-----
"""
ENCRYPTED = """\
-----BEGIN ENCRYPTED PRIVATE KEY-----
MIH0MF8GCSqGSIb3DQEFDTBSMDEGCSqGSIb3DQEFDDAkBBBmHi3xJTwppG1xUzxN
8aBJAgIIADAMBggqhkiG9w0CCQUAMB0GCWCGSAFlAwQBKgQQzRGulQvd6hyuSlUH
7i9YkQSBkKncBD+gStJo1emyAu5QxnguwKko336OcfXdDl061Y2j+pJ8hrqEjqie
OQXOA2CaNjIs5srgcQglxubl+Eh+gzmYXqdglEbKED2nWiax/WAcaXxTyv6uIhJv
4ARkzCllPnYlHiDgYjBqDvJJJA90IlnFKpbZuE3zvQppW4+x4YCZ+zOeEujBvF1E
HaGip0izng==
-----END ENCRYPTED PRIVATE KEY-----
"""
KEY2 = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgIuxbTJF7Ipi6ejEi
JipOHQauoEVAYtbWQ8GsjK9UwWShRANCAAQj2w0DuMX+OHABMwKuBnSWbbCqTTPR
K1XwQNj+pZWC9UTlAlMt3eQmmU529/Fka3GXt6ljRvGqSzJpTCUn36aX
-----END PRIVATE KEY-----
"""
