"""The main job: runs the whole system at once and checks at the end that all counts agree.

    stations ─► broker ─► a subscriber of everything
                  ├─► queue ─► Spark ─► history in Parquet, a picture of it
                  │              └─► alerts ─► broker ─► a subscriber of alerts
                  ├─► persistent queries, by filters and over the graph, paced by active control
                  └─► the page

The broker and Spark run as separate processes, as in production. Simulated time runs fast: an hour of readings passes
in a sixth of a second. `main_job` runs the job, `counts` compares the counts at both ends of every path,
`persistent_queries` keeps queries open, and `picture` draws the history.
"""
