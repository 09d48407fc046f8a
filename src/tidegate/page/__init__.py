"""The page that a broker serves at `/`: one HTML file, one style sheet, and one JavaScript module per part. No Python.

`main.js` puts the parts together. They reach the broker only through `broker.js`, and the document only through
`elements.js`. Data from outside is shown as text, never parsed as HTML. `listeners/http/page.py` serves the page.
"""
