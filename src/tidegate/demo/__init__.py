"""The main job: everything at once, and a count at the end that must agree.

    stations ─► broker ─► a subscriber of everything
                  ├─► queue ─► Spark ─► history in Parquet, a picture of it
                  │              └─► alerts ─► broker ─► a subscriber of alerts
                  ├─► persistent queries, by filters and over the graph, paced by active control
                  └─► the page

The broker and Spark are processes of their own, as in real life. Time runs fast: an hour of readings passes in a sixth
of a second. `main_job` runs it, `counts` compares both ends of every way, `persistent_queries` keeps asking, `picture`
draws what the history has.
"""
