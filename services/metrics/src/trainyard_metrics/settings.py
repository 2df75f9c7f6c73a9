"""What an operator can set."""

from __future__ import annotations

from pydantic import Field
from servicekit.settings import Settings as ServiceSettings


class Settings(ServiceSettings):
    """Limits and periods of the metrics ingestor."""

    max_batch_bytes: int = Field(4 * 1024 * 1024, gt=0)
    """Size of one batch."""
    max_stream_bytes: int = Field(16 * 1024 * 1024, gt=0)
    """Bytes of one stream that may wait to be stored; beyond them the stream is not read."""
    max_stream_batches: int = Field(256, gt=0)
    """Batches of one stream that may wait to be stored."""
    max_group_bytes: int = Field(8 * 1024 * 1024, gt=0)
    """What is written with one fsync."""
    max_waiting_bytes: int = Field(128 * 1024 * 1024, gt=0)
    """Bytes of all streams together that may wait to be stored."""
    max_segment_bytes: int = Field(16 * 1024 * 1024, gt=0)
    """Size at which a run's journal goes on in a new file, and the old one is compacted."""
    max_segment_frames: int = Field(20_000, gt=0)
    """Frames after which it does so as well: reading many small ones is slow."""
    quiet_s: float = Field(60, ge=0)
    """A run without records for this long is compacted, when it has enough of them."""
    min_compacted_bytes: int = Field(1024 * 1024, gt=0)
    """What is enough; smaller runs stay journals."""
    merged_files: int = Field(8, gt=1)
    """As many column files of one level become one of the next."""
    max_column_bytes: int = Field(1024 * 1024 * 1024, gt=0)
    """Column files are not merged beyond this size."""
    max_names_per_run: int = Field(10_000, gt=0)
    """Names of series; points of further names are kept under the name `trainyard/refused`."""
    max_writers_per_run: int = Field(100_000, gt=0)
    """Writing processes of one run."""
    max_open_runs: int = Field(256, gt=0)
    """Runs whose files are held open while nobody uses them."""
    max_params_bytes: int = Field(256 * 1024, gt=0)
    """Size of a run's params, and of its notes, and of its tags."""
    max_context_bytes: int = Field(1024 * 1024, gt=0)
    """Size of a run's context."""
    max_query_points: int = Field(10_000_000, gt=0)
    """Points that one query may return."""
    max_cached_bytes: int = Field(32 * 1024 * 1024, ge=0)
    """Answers about points that are kept for whoever asks the same again."""
    query_threads: int = Field(4, gt=0)
    """Threads that read points and lines for queries."""
    max_tail_lines: int = Field(100_000, gt=0)
    """The largest tail of logs."""
    max_log_readers: int = Field(16, gt=0)
    """Readers of lines that hold files and decoded lines, about 5 MB each. Another one takes the place of the one that
    has waited longest for its client, which continues later where it was."""
    log_reader_idle_s: float = Field(30.0, gt=0)
    """A reader of lines whose client has not taken its next page for this long holds neither."""
    watch_interval_s: float = Field(0.2, ge=0)
    """The shortest time between two answers to a watcher."""
    summary_interval_s: float = Field(1.0, gt=0)
    """The shortest time between two saves of the summaries of runs that are being written."""
    summary_quiet_s: float = Field(10.0, gt=0)
    """After this long without a record a run's summary is final: a crash does not make it anew."""
    summary_kept_s: float = Field(900.0, gt=0)
    """How long the summary of a run that nobody writes any more stays in memory."""
    exported_s: float = Field(600.0, ge=0)
    """Prometheus is shown runs that changed within this time."""
    max_exported_series: int = Field(10_000, ge=0)
    """Series that Prometheus is shown, of the runs that changed last; `trainyard_run_series_left_out` has the rest."""
    plain_run_ttl_s: float = Field(0, ge=0)
    """How long a plain process's run is kept after its newest point; 0: for ever. Runs of jobs go with their jobs."""
    log_ttl_s: float = Field(0, ge=0)
    """How long the lines of a run are kept after its newest point; 0: as long as the run."""
    retention_interval_s: float = Field(3600, gt=0)
    """How often old runs and logs are looked for."""
