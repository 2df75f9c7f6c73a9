"""`yard run`: submit a job, show it live, sum it up."""
