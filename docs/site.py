"""What `make site` does beside mkdocs: links in notebooks lead to the pages that they are on the site."""

import logging
import posixpath
import re

log = logging.getLogger("mkdocs.site")


def on_page_content(html, page, config, files):
    """Point links of a notebook, which mkdocs leaves as they are, at pages. Warns of one that leads nowhere."""

    def lead(link):
        path, anchor, name = link[1].partition("#")
        if not path:
            return f'href="#{name.lower()}"'
        found = files.get_file_from_path(posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), path)))
        if found is None:
            log.warning("%s: no page for the link %s", page.file.src_uri, link[1])
            return link[0]
        return f'href="{found.url_relative_to(page.file)}{anchor}{name.lower()}"'

    if not page.file.src_uri.endswith(".ipynb"):
        return html
    return re.sub(r'href="((?![a-z]+:)[^"]+)"', lead, html)
