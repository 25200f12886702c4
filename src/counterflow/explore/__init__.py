"""The live page: what a schedule will do, what a run does, and why they differ; in a browser on this machine.

A web server (``web_app.py``) hands out one page of plain files (``static/``) and answers it in JSON. It asks
the other rooms: a schedule is built by the registry, proved by the checker, timed by the simulator, ordered
by ``synthesize``, ranked by ``plan``, and a run is read from its folder. The page draws, and has the user's
choices in its address. Long searches run in a process of their own (``jobs.py``, ``work.py``).

Invariant: nothing here, and nothing in ``static/``, knows a rule of schedules or works out a time. Nothing is
loaded from elsewhere. A wrong request is answered with 4xx and a sentence.

Not here: making or changing a run. Needs starlette and uvicorn, the extra ``counterflow[explore]``.
"""
