"""Which file systems a run trusts, from tables of mounts as machines have them."""

from __future__ import annotations

from pathlib import Path

import pytest

from counterflow.measure.storage import storage_of

ROOT = "25 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n"


@pytest.mark.parametrize(
    ("about", "renames", "locks", "why"),
    [
        ("xfs /dev/sdb rw", True, True, ""),
        ("nfs4 server:/export rw,vers=4.2,local_lock=none", True, True, ""),
        ("nfs server:/export rw,vers=3,nolock,local_lock=all", True, False, "mounted with local_lock=all"),
        ("lustre 10.0.0.1@tcp:/fs rw,flock,lazystatfs", True, True, ""),
        ("lustre 10.0.0.1@tcp:/fs rw,localflock,lazystatfs", True, False, "mounted with localflock"),
        ("lustre 10.0.0.1@tcp:/fs rw,lazystatfs", True, False, "mounted without flock"),
        ("fuse.s3fs s3fs rw,user_id=0", False, False, "an object store"),
        ("fuse.gcsfuse my-bucket rw", False, False, "an object store"),
        ("fuse.rclone remote:bucket rw", False, False, "an object store"),
        ("fuse.goofys my-bucket rw", False, False, "an object store"),
        ("fuse mountpoint-s3 rw", False, False, "an object store"),
        ("fuse.juicefs JuiceFS:data rw", True, True, ""),
        ("fuse.sshfs host:/data rw", False, False, "its renames onto existing files"),
        ("fuse.something host:/data rw", None, None, ""),
        ("9p shared rw", None, None, ""),
    ],
)
def test_what_is_trusted(about: str, renames: bool | None, locks: bool | None, why: str) -> None:
    found = storage_of(Path("/data/runs/first"), f"{ROOT}52 25 0:45 / /data rw,nosuid shared:7 - {about}\n")
    assert (found.kind, found.point) == (about.partition(" ")[0], Path("/data"))
    assert (found.renames, found.locks) == (renames, locks)
    assert found.why.startswith(why)
    assert bool(found.why) == bool(why)


def test_the_nearest_mount_counts_and_of_two_in_one_place_the_later_one() -> None:
    mounts = (
        f"{ROOT}52 25 0:45 / /data rw - ext4 /dev/sdb rw\n"
        "53 52 0:47 / /data rw - xfs /dev/sdc rw\n"
        "54 53 0:46 / /data/my\\040runs rw - fuse.s3fs s3fs rw\n"
        "no line of such a table\n"
    )
    assert storage_of(Path("/data/my runs/first"), mounts).kind == "fuse.s3fs"
    assert storage_of(Path("/data/my"), mounts).kind == "xfs"
    assert storage_of(Path("/database"), mounts).kind == "ext4"
    assert storage_of(Path("/data"), "").kind == ""


def test_this_machine_has_some(tmp_path: Path) -> None:
    found = storage_of(tmp_path / "not" / "there")
    assert found.point in tmp_path.resolve().parents or found.point == tmp_path
