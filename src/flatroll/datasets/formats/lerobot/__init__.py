"""LeRobot v3 folders, written and read with pyarrow alone; images as PNG cells.

meta/info.json, meta/stats.json, meta/tasks.parquet
meta/episodes/chunk-000/file-000.parquet   a row for each episode: its length, its task, where its frames stand
data/chunk-000/file-000.parquet            a row for each step
meta/flatroll.json, meta/flatroll_last.parquet   what LeRobot has no place for: keys, shapes, last observations
"""
