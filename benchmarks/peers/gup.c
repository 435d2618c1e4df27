/*
 * What acquiring pages costs at least, in plain C: the same struct pages, the same atomics, the same result in memory.
 * bench_gup.py compiles this with the flags of the extension and calls it without the GIL.
 *
 *	gup_fill	write the PFNs of leaves into a buffer, and nothing else
 *	gup_fresh	the same into new memory, taken and advised as the engine takes it; gup_drop gives it back
 *	gup_ranges	pin leaves and write them as runs: look at the head, add to both counters, look at the entry again
 *	gup_release	drop what gup_ranges pinned
 *	gup_list	take leaves and write the PFN of every page: with `pin` as gup_ranges pins, else references alone
 *	gup_unlist	drop what gup_list took
 *
 * `leaf` holds page table entries: PFN << 12 and the bits that a present, writable user entry has.
 */
#include <stdint.h>
#include <sys/mman.h>

#include "page.h"
#include "atomic.h"

#define ENTRY_BITS 0x7ULL		/* present, writable, user */
#define PFN_OF(entry) (((entry) & 0x000ffffffffff000ULL) >> 12)
#define PG_HEAD 6
#define AHEAD 12

void gup_fill(uint64_t *out, const uint64_t *leaf, uint64_t nr, uint64_t pages)
{
	for (uint64_t i = 0; i < nr; i++) {
		uint64_t pfn = PFN_OF(leaf[i]);

		for (uint64_t k = 0; k < pages; k++)
			out[k] = pfn + k;
		out += pages;
	}
}

void *gup_fresh(const uint64_t *leaf, uint64_t nr, uint64_t pages)
{
	uint64_t size = nr * pages * 8;
	void *out = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	if (out == MAP_FAILED)
		return 0;
#ifdef MADV_HUGEPAGE
	madvise(out, size, MADV_HUGEPAGE);
#endif
	gup_fill(out, leaf, nr, pages);
	return out;
}

void gup_drop(void *out, uint64_t nr, uint64_t pages)
{
	munmap(out, nr * pages * 8);
}

int64_t gup_ranges(struct page *map, const uint64_t *leaf, uint64_t nr, uint64_t pages, uint64_t *pfns, uint64_t *counts)
{
	uint64_t runs = 0, next = 0;

	for (uint64_t i = 0; i < nr; i++) {
		uint64_t entry = a64_load_acquire(&leaf[i]), pfn = PFN_OF(entry);
		struct page *head = &map[pfn];
		struct folio *folio = (struct folio *)head;
		uint32_t refs;

		if (i + AHEAD < nr) {
			prefetch_write(&map[PFN_OF(leaf[i + AHEAD])]);
			prefetch_write(&map[PFN_OF(leaf[i + AHEAD]) + 1]);
		}
		if ((entry & ENTRY_BITS) != ENTRY_BITS || !((a64_load_relaxed(&head->flags) >> PG_HEAD) & 1))
			return -1 - (int64_t)i;
		refs = a32_load_relaxed(&head->_refcount);
		do {
			if ((int32_t)refs <= 0)
				return -1 - (int64_t)i;
		} while (!a32_cas_acq_rel(&head->_refcount, &refs, refs + (uint32_t)pages));
		a32_fetch_add_relaxed(&folio->_pincount, (uint32_t)pages);
		if (a64_load_acquire(&leaf[i]) != entry)
			return -1 - (int64_t)i;
		if (pfn == next) {
			counts[runs - 1] += pages;
		} else {
			pfns[runs] = pfn;
			counts[runs] = pages;
			runs++;
		}
		next = pfn + pages;
	}
	return (int64_t)runs;
}

void gup_release(struct page *map, const uint64_t *leaf, uint64_t nr, uint64_t pages)
{
	for (uint64_t i = 0; i < nr; i++) {
		struct page *head = &map[PFN_OF(leaf[i])];

		a32_fetch_sub_acq_rel(&((struct folio *)head)->_pincount, (uint32_t)pages);
		a32_fetch_sub_acq_rel(&head->_refcount, (uint32_t)pages);
	}
}

int64_t gup_list(struct page *map, const uint64_t *leaf, uint64_t nr, uint64_t pages, uint64_t *out, uint64_t pin)
{
	for (uint64_t i = 0; i < nr; i++) {
		uint64_t entry = a64_load_acquire(&leaf[i]), pfn = PFN_OF(entry);
		struct page *head = &map[pfn];
		uint32_t refs;

		if (i + AHEAD < nr) {
			prefetch_write(&map[PFN_OF(leaf[i + AHEAD])]);
			prefetch_write(&map[PFN_OF(leaf[i + AHEAD]) + pin]);
		}
		if ((entry & ENTRY_BITS) != ENTRY_BITS || !((a64_load_relaxed(&head->flags) >> PG_HEAD) & 1))
			return -1 - (int64_t)i;
		refs = a32_load_relaxed(&head->_refcount);
		do {
			if ((int32_t)refs <= 0)
				return -1 - (int64_t)i;
		} while (!a32_cas_acq_rel(&head->_refcount, &refs, refs + (uint32_t)pages));
		if (pin)
			a32_fetch_add_relaxed(&((struct folio *)head)->_pincount, (uint32_t)pages);
		if (a64_load_acquire(&leaf[i]) != entry)
			return -1 - (int64_t)i;
		for (uint64_t k = 0; k < pages; k++)
			out[k] = pfn + k;
		out += pages;
	}
	return (int64_t)nr;
}

void gup_unlist(struct page *map, const uint64_t *leaf, uint64_t nr, uint64_t pages, uint64_t pin)
{
	for (uint64_t i = 0; i < nr; i++) {
		struct page *head = &map[PFN_OF(leaf[i])];

		if (pin)
			a32_fetch_sub_acq_rel(&((struct folio *)head)->_pincount, (uint32_t)pages);
		a32_fetch_sub_acq_rel(&head->_refcount, (uint32_t)pages);
	}
}
