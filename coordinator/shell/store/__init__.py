"""Everything that lies on disks or in an object store: journals, blobs, bulk bytes, users' data."""
