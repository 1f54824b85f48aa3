"""What the server answers, one router a module; `headrace.server.app` lists them."""
