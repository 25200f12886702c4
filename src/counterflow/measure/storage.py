"""The file system of a folder, and what a run can rely on: renames, locks, durability.

A run's fence and lock, and a checkpoint that is complete or absent, need three things: a rename is one step,
a lock (flock) holds between machines, and the names in a folder can be synced to the disk (fsync).

Invariant: only the table of mounts is read. What is unknown is reported as unknown. torch is not imported.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
"""Linux's table of mounts."""

WANTED = "a rename is one step, and locks hold on all machines that see it"
ADVICE = "let one run at a time write there, without restarts, or use a folder of another file system"
"""Advice for other file systems."""

_OBJECTS = re.compile(
    r"s3fs|s3ql|s3backer|gcsfuse|rclone|goofys|geesefs|yas3fs|riofs|mountpoint-s3|mount-s3|blobfuse2?|ossfs2?"
    r"|cosfs|obsfs|tigrisfs|hf-mount"
)
"""Object stores mounted as folders: a rename copies and deletes, and locks, if any, are local to a machine.
"""

_KNOWN = {
    *("nfs", "nfs4", "lustre", "gpfs", "ceph", "wekafs", "ocfs2", "gfs2", "beegfs"),
    *("fuse.ceph", "fuse.ceph-fuse", "fuse.glusterfs", "fuse.juicefs"),
    *("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "jfs", "reiserfs"),
    *("tmpfs", "ramfs", "overlay", "apfs"),
}
"""File systems that fulfil these needs, with suitable mount options."""

_LOCAL_LOCKS = {"localflock", "noflock", "nolock", "local_lock=flock", "local_lock=all"}
"""Mount options of NFS and Lustre that make locks local."""


@dataclass(frozen=True, slots=True)
class Storage:
    """The file system of a folder.

    Attributes:
        kind: type by the system's name, such as ``ext4``; empty: unknown.
        point: mount point.
        renames: whether a rename is one step and durable; None: unknown.
        locks: whether a lock holds on all machines that see the folder; None: unknown.
        why: the problem, as a clause; empty: no known problem.
    """

    kind: str
    point: Path
    renames: bool | None = None
    locks: bool | None = None
    why: str = ""


def storage_of(folder: Path, mounts: str | None = None) -> Storage:
    r"""The file system that a folder is on, or would be.

    >>> mounts = "36 25 0:31 / / rw - ext4 /dev/vda rw\n52 36 0:45 / /data rw - fuse.s3fs s3fs rw"
    >>> storage_of(Path("/data/runs"), mounts).kind, storage_of(Path("/home"), mounts).renames
    ('fuse.s3fs', True)

    Args:
        folder: the folder, which need not exist.
        mounts: the table of mounts in the form of Linux's ``/proc/self/mountinfo``; None: that of this
            machine.
    """
    if mounts is None:
        try:
            mounts = MOUNTS.read_text(encoding="utf-8", errors="surrogateescape")
        except OSError:
            return Storage("", folder)
    where = folder.resolve()
    mount: tuple[Path, list[str]] | None = None
    for line in mounts.splitlines():
        before, divided, after = line.partition(" - ")
        if not divided:
            continue
        point = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), before.split()[4]))
        # The longest mount point contains the folder; of two equal ones the later hides the earlier.
        if where.is_relative_to(point) and (
            mount is None or mount[0] == point or point.is_relative_to(mount[0])
        ):
            mount = point, after.split()
    return Storage("", folder) if mount is None else _judged(*mount)


def _judged(point: Path, about: list[str]) -> Storage:
    kind, source = about[0], about[1]
    options = set(",".join(about[2:]).split(","))
    names = kind.removeprefix("fuse."), source.partition("#")[0].partition(":")[0]
    renames: bool | None = True
    locks: bool | None = True
    why = ""
    if kind.startswith("fuse") and any(_OBJECTS.fullmatch(name) for name in names):
        renames = locks = False
        why = "an object store, whose renames are copies and whose locks hold on one machine at most"
    elif kind == "fuse.sshfs":
        renames = locks = False
        why = "its renames onto existing files are two steps, and its locks hold on one machine only"
    elif local := options & _LOCAL_LOCKS:
        locks, why = False, f"mounted with {min(local)}, so its locks hold on one machine only"
    elif kind == "lustre" and "flock" not in options:
        locks, why = False, "mounted without flock, so nothing can be locked"
    elif kind not in _KNOWN:
        renames = locks = None
    return Storage(kind, point, renames, locks, why)
