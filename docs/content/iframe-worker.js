// Browsers start no Worker for pages that are opened from a disk. There, the theme's search runs in a hidden frame.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = Object.assign(document.createElement("iframe"), { hidden: true })
      document.body.append(this.frame)
      const scope = this.frame.contentWindow
      scope.postMessage = data => {
        const event = new MessageEvent("message", { data })
        this.dispatchEvent(event)
        this.onmessage?.(event)
      }
      this.ready = new Promise((resolve, reject) => {
        const script = scope.document.createElement("script")
        Object.assign(script, { src: url, onload: resolve, onerror: reject })
        scope.document.body.append(script)
      })
    }
    postMessage(data) {
      const scope = this.frame.contentWindow
      this.ready.then(() => scope.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {
      this.frame.remove()
    }
  }
}
