export const defaults = {};

export function mount(section, page) {}
