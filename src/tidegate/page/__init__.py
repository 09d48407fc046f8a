"""The page that a broker serves at `/`: one HTML file, one style, one JavaScript module a part. No Python here.

`main.js` puts the parts together; `broker.js` is their only way to the broker, `elements.js` their only way to the
document. Whatever comes from outside is shown as text, never read as HTML. `listeners/http_page.py` serves it.
"""
