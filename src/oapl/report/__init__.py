"""What a run shows: `summary.json`, a table and a picture of pass@k, and the page that `oapl report` writes."""

from oapl.report.summary import (
    draw_pass_at_k,
    evaluation_table,
    format_interval,
    plot_pass_at_k,
    scores_table,
    summarize,
    summarize_run,
    summary_table,
)

__all__ = [
    "draw_pass_at_k",
    "evaluation_table",
    "format_interval",
    "plot_pass_at_k",
    "scores_table",
    "summarize",
    "summarize_run",
    "summary_table",
]
